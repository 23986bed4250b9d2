# A loader server. Build it at the root of the repository, generate tokens, and mount the server's file of them:
#
#   docker build -f docker/server.Dockerfile -t teleloader-server .
#   make secrets
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/docker/secrets/tokens.toml:/run/secrets/tokens.toml:ro" \
#       -e TELELOADER_SERVER_TOKENS=/run/secrets/tokens.toml teleloader-server
#
# To host datasets of your own, build on this image: install your package, and set the command to
# `my_package.data:train --num-workers 8`, say. No --shm-size is needed: batches are in anonymous memory, not in /dev/shm.

# The exact version. A tag can still be moved, a digest cannot: `docker buildx imagetools inspect python:...` shows it,
# for --build-arg PYTHON=python@sha256:... where you build for others.
ARG PYTHON=python:3.12.12-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /source
# Versions and hashes are pinned, by `make lock`. Installed aside, so that what builds does not come into the image.
COPY docker/requirements/build.txt docker/requirements/server.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement build.txt \
    && pip install --no-cache-dir --require-hashes --requirement server.txt --prefix /installed \
    && find /installed -type d -name tests -prune -exec rm -r {} +
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY shared shared
# (The linter would have a version pinned, which a source tree does not have.)
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps --no-build-isolation --prefix /installed .

FROM ${PYTHON}
COPY docker/healthcheck.py /usr/local/lib/teleloader/
COPY --from=build /installed /usr/local

# The root file system can be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TELELOADER_HOST=0.0.0.0 \
    TELELOADER_PORT=8000 \
    TELELOADER_NUM_WORKERS=2
# 0.0.0.0 is the container's own network; who can reach that is decided where the port is published, and who may come in
# by tokens, without which the server does not start.
EXPOSE 8000
USER 10001:10001

# (Where clients must show certificates, so must this: give the container another health check.)
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "/usr/local/lib/teleloader/healthcheck.py"]

# In exec form, so that the server itself is what SIGTERM reaches.
ENTRYPOINT ["teleloader-server"]
CMD ["--demo"]
