# Two images from one file: `router` (no torch, no UCX) and `worker` (prefill and decode).
#   BASE         any image with Python 3.11 or later and venv
#   WHEELS       a local folder of wheels, relative to the context; may be missing
#   PIP_OPTIONS  for instance "--no-index" when all wheels are in that folder
ARG BASE=python:3.11-slim

FROM scratch AS source
COPY pyproject.toml setup.py README.md ./
COPY protocol protocol
COPY router router
COPY transfer transfer
COPY kernels kernels
COPY engine engine
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY loadgen loadgen
COPY baton baton
COPY demo demo

FROM ${BASE} AS build
ARG WHEELS=.wheels
ARG PIP_OPTIONS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The C kernels are optional: without a compiler the wheel is built without them and workers choose the torch kernels.
RUN command -v cc >/dev/null || (apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
# README.md is there so that the copy succeeds when the wheels folder is missing.
COPY README.md ${WHEELS}* /wheels/
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install ${PIP_OPTIONS} --find-links /wheels "pip>=25.1" "setuptools>=77" wheel
WORKDIR /src
COPY pyproject.toml ./

# Dependencies first: their layer stays when only the code changes.
FROM build AS build-router
ARG PIP_OPTIONS=""
RUN /opt/venv/bin/pip install ${PIP_OPTIONS} --find-links /wheels --group router
COPY --from=source / ./
RUN /opt/venv/bin/pip install ${PIP_OPTIONS} --no-deps --no-build-isolation . \
 && ! /opt/venv/bin/python -c "import torch" 2>/dev/null

FROM build AS build-worker
ARG PIP_OPTIONS=""
RUN /opt/venv/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && /opt/venv/bin/pip install ${PIP_OPTIONS} --find-links /wheels -r requirements.txt
COPY --from=source / ./
RUN /opt/venv/bin/pip install ${PIP_OPTIONS} --no-deps --no-build-isolation .

FROM ${BASE} AS router
COPY --from=build-router /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 baton
USER baton
WORKDIR /tmp
EXPOSE 8000
CMD ["baton-router"]

FROM ${BASE} AS worker
COPY --from=build-worker /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 baton
USER baton
WORKDIR /tmp
CMD ["baton-decode"]
