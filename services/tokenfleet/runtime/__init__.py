"""The only place that knows NATS and the wall clock: what every service's shell lives in.

Decides nothing about requests. It reads streams in order, drives cores, keeps offices by compare-and-set, publishes,
watches health and turns signals into an orderly stop.
"""
