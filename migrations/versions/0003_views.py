"""Views over the ledger for people and dashboards, and a function that reads a stretch of it only; docs/metrics.md says
what each column means.

Revision: 0003
Follows: 0002

All are grouped, so none can be written through. A later migration that changes `attempts` drops and makes them again.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

#: the end of the minute (end - 1 min, end] in which an attempt finished, as windows on the bus have their ends
_MINUTE = (
    "date_bin('1 minute', finished_at - interval '1 microsecond', timestamptz '1970-01-01 00:00:00+00')"
    " + interval '1 minute'"
)

_FIGURES = """
            service_class, tenant, model, served_site,
            count(*) FILTER (WHERE final) AS offered,
            count(*) FILTER (WHERE final AND outcome = 'completed') AS completed,
            count(*) FILTER (WHERE compliant) AS compliant,
            count(*) FILTER (WHERE final AND outcome = 'refused') AS refused,
            count(*) FILTER (WHERE final AND outcome IN ('cancelled', 'client_stalled')) AS cancelled,
            count(*) FILTER (
                WHERE final AND outcome NOT IN ('completed', 'refused', 'cancelled', 'client_stalled')
            ) AS failed,
            count(*) FILTER (WHERE NOT final) AS repeated,
            coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
            coalesce(sum(output_tokens) FILTER (WHERE compliant), 0)::bigint AS compliant_tokens,
            coalesce(sum(wasted_tokens), 0)::bigint AS wasted_tokens,
            coalesce(sum(offered_output_tokens) FILTER (WHERE final), 0)::bigint AS offered_output_tokens,
            count(*) FILTER (WHERE final AND ttft_ms IS NOT NULL AND predicted_ttft_ms IS NOT NULL) AS predicted,
            percentile_disc(0.5) WITHIN GROUP (ORDER BY ttft_ms) FILTER (WHERE final) AS ttft_ms_p50,
            percentile_disc(0.99) WITHIN GROUP (ORDER BY ttft_ms) FILTER (WHERE final) AS ttft_ms_p99,
            percentile_disc(0.5) WITHIN GROUP (ORDER BY tpot_ms) FILTER (WHERE final AND outcome = 'completed')
                AS tpot_ms_p50
"""
_COLUMNS = """
    service_class text, tenant text, model text, served_site text, offered bigint, completed bigint, compliant bigint,
    refused bigint, cancelled bigint, failed bigint, repeated bigint, output_tokens bigint, compliant_tokens bigint,
    wasted_tokens bigint, offered_output_tokens bigint, predicted bigint, ttft_ms_p50 double precision,
    ttft_ms_p99 double precision, tpot_ms_p50 double precision
"""

#: a view cannot push a wish for the last hour down to the index on `finished_at`; a function's arguments are there
_FUNCTION = f"""
    CREATE FUNCTION goodput_windows(since timestamptz, until timestamptz, step interval)
    RETURNS TABLE (window_end timestamptz, {_COLUMNS}) LANGUAGE sql STABLE AS $$
        SELECT
            date_bin(step, finished_at - interval '1 microsecond', timestamptz '1970-01-01 00:00:00+00') + step,
            {_FIGURES}
        FROM attempts
        WHERE finished_at > since AND finished_at <= until
        GROUP BY 1, service_class, tenant, model, served_site
    $$
"""

_VIEWS = {
    "goodput_minutes": f"""
        SELECT
            {_MINUTE} AS minute_end,
            {_FIGURES}
        FROM attempts
        GROUP BY minute_end, service_class, tenant, model, served_site
    """,
    "wasted_minutes": f"""
        SELECT
            {_MINUTE} AS minute_end,
            service_class, tenant, model, served_site, wasted_cause,
            count(*) AS attempts, sum(wasted_tokens)::bigint AS wasted_tokens
        FROM attempts
        WHERE wasted_tokens > 0
        GROUP BY minute_end, service_class, tenant, model, served_site, wasted_cause
    """,
    "ledger_requests": """
        SELECT
            request_id,
            min(tenant) AS tenant,
            min(service_class) AS service_class,
            min(model_asked) AS model_asked,
            received_at,
            max(finished_at) AS finished_at,
            max(outcome) FILTER (WHERE final) AS outcome,
            bool_or(compliant) AS compliant,
            max(missed) FILTER (WHERE final) AS missed,
            count(*) AS attempts,
            array_agg(instance ORDER BY attempt) AS instances,
            coalesce(sum(output_tokens) FILTER (WHERE final), 0)::bigint AS output_tokens,
            sum(wasted_tokens)::bigint AS wasted_tokens
        FROM attempts
        GROUP BY request_id, received_at
    """,
    "ledger_contradictions": """
        SELECT request_id, count(*) AS rows, count(*) FILTER (WHERE final) AS finals,
            count(DISTINCT received_at) AS receipts
        FROM attempts
        GROUP BY request_id
        HAVING count(*) FILTER (WHERE final) > 1 OR count(DISTINCT received_at) > 1
    """,
}


def upgrade() -> None:
    op.execute(_FUNCTION)
    for name, query in _VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    for name in _VIEWS:
        op.execute(f"DROP VIEW {name}")
    op.execute("DROP FUNCTION goodput_windows(timestamptz, timestamptz, interval)")
