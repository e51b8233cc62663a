# One image for all commands. `make image` fills dist/image/, all that is needed from outside of the base image; building needs no network.
#
# Your own tools: FROM this image, then `USER 0`, `RUN pip install …`, `COPY my_tools.py /app/`, `USER 10001`.
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
# What others have written, which seldom changes: Docker keeps this step's result.
# pip comes with the interpreter and is needed only here. Bytecode is made now, since nothing can be written when it runs; the thousands of
# generated modules of the Kubernetes client that nobody imports would add 50 MB of it.
COPY dist/image/wheels /tmp/image/wheels
COPY dist/image/requirements.txt /tmp/image/
RUN python -m venv /opt/agentrun \
 && /opt/agentrun/bin/python -m pip install --no-index --find-links /tmp/image/wheels --no-deps --require-hashes --no-cache-dir \
    --disable-pip-version-check --no-compile --quiet -r /tmp/image/requirements.txt \
 && /opt/agentrun/bin/python -m compileall -q -x '/kubernetes/(aio/)?client/(api|models)/|/pip/' /opt/agentrun/lib
COPY dist/image/own /tmp/image/own
RUN /opt/agentrun/bin/python -m pip install --no-index --find-links /tmp/image/own --no-deps --require-hashes --no-cache-dir \
    --disable-pip-version-check --no-compile --quiet -r /tmp/image/own/requirements.txt \
 && /opt/agentrun/bin/python -m pip check \
 && /opt/agentrun/bin/python -m pip uninstall --yes --quiet pip \
 && /opt/agentrun/bin/python -m compileall -q /opt/agentrun/lib/python3*/site-packages/agentrun* \
 && /opt/agentrun/bin/python /tmp/image/own/sbom.py > /opt/agentrun/sbom.cdx.json

FROM ${BASE_IMAGE}
COPY --from=build /opt/agentrun /opt/agentrun
# PIP_PYTHON and VIRTUAL_ENV: pip and uv of a derived image install where agentrun is.
ENV PATH=/opt/agentrun/bin:$PATH VIRTUAL_ENV=/opt/agentrun PIP_PYTHON=/opt/agentrun/bin/python \
    PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["agentrun"]

ARG VERSION=""
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="agentrun" \
      org.opencontainers.image.description="Run LLM agents on your own Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
