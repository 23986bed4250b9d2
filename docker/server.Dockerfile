# Loader server. Build at the root of the repository, generate tokens, and mount the server's token file:
#
#   docker build -f docker/server.Dockerfile -t teleloader-server .
#   make secrets
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/docker/secrets/tokens.toml:/run/secrets/tokens.toml:ro" \
#       -e TELELOADER_SERVER_TOKENS=/run/secrets/tokens.toml teleloader-server
#
# To host your own datasets, build on this image: install your package and set the command, such as
# `my_package.data:train --num-workers 8`. No --shm-size is needed: batches are in anonymous memory, not in /dev/shm.

# A tag can be moved, a digest cannot. To pin the digest, look it up with `docker buildx imagetools inspect python:...`
# and pass --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.12.12-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /source
# Versions and hashes are pinned by `make lock`. A separate prefix keeps build tools out of the final image.
COPY docker/requirements/build.txt docker/requirements/server.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement build.txt \
    && pip install --no-cache-dir --require-hashes --requirement server.txt --prefix /installed \
    && find /installed -type d -name tests -prune -exec rm -r {} +
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY shared shared
# DL3013 requires a pinned version, which a source tree does not have.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps --no-build-isolation --prefix /installed .

FROM ${PYTHON}
COPY docker/healthcheck.py /usr/local/lib/teleloader/
COPY --from=build /installed /usr/local

# No bytecode is written: the root file system can be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TELELOADER_HOST=0.0.0.0 \
    TELELOADER_PORT=8000 \
    TELELOADER_NUM_WORKERS=2
# 0.0.0.0 is inside the container's network: the published port decides who can reach it. The server does not start
# without tokens.
EXPOSE 8000
USER 10001:10001

# This check presents no client certificate: configure another one if the server requires them (--ssl-ca-certs).
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "/usr/local/lib/teleloader/healthcheck.py"]

# Exec form: SIGTERM must reach the server, not a shell.
ENTRYPOINT ["teleloader-server"]
CMD ["--demo"]
