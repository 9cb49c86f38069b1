# One image for every service: `docker run tokenfleet run gateway`. Settings are TOKENFLEET_* variables and the fleet
# file. Nothing here needs BuildKit.
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=gateway,slomax,fleetmind,tokenpilot,siteagent,accountant,emulator
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tokenfleet
WORKDIR /src
# the dependencies first, with empty packages in our place: a change of our code does not install them again
COPY pyproject.toml constraints.txt README.md ./
RUN mkdir -p services/tokenfleet schemas/tokenfleet_schemas migrations \
 && touch services/tokenfleet/__init__.py schemas/tokenfleet_schemas/__init__.py migrations/empty \
 && /opt/tokenfleet/bin/pip install -c constraints.txt ".[${EXTRAS}]" \
 && /opt/tokenfleet/bin/pip uninstall -y tokenfleet \
 && rm -rf services schemas migrations
COPY services services
COPY schemas schemas
COPY migrations migrations
RUN /opt/tokenfleet/bin/pip install --no-deps . \
 && /opt/tokenfleet/bin/pip uninstall -y pip \
 && /opt/tokenfleet/bin/python -m compileall -q /opt/tokenfleet/lib

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 tokenfleet && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent tokenfleet
COPY --from=build /opt/tokenfleet /opt/tokenfleet
ENV PATH=/opt/tokenfleet/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENFLEET_FLEET=/etc/tokenfleet/fleet.toml \
    TOKENFLEET_HOST=0.0.0.0 \
    TOKENFLEET_METRICS_PORT=9090
USER 10001:10001
WORKDIR /
EXPOSE 8080 9090
# a plain socket: importing an HTTP client in a dozen containers every few seconds costs more than the services' idling
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-I", "-S", "-c", \
    "import os, socket; s = socket.create_connection(('127.0.0.1', int(os.environ['TOKENFLEET_METRICS_PORT'])), 3); s.sendall(b'GET /readyz HTTP/1.0\\r\\n\\r\\n'); raise SystemExit(b' 200 ' not in s.recv(64))"]
ENTRYPOINT ["tokenfleet"]
