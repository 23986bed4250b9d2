# A loader server. Build it at the root of the repository:
#
#   docker build -f docker/server.Dockerfile -t teleloader-server .
#   docker run --rm -p 127.0.0.1:8000:8000 teleloader-server
#
# To host datasets of your own, build on this image: install your package, and set the command to
# `my_package.data:train --num-workers 8`, say. No --shm-size is needed: batches are in anonymous memory, not in /dev/shm.

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY shared shared
# Installed aside, so that neither the source nor what builds it comes into the image. (The linter would have a version
# pinned, which a source tree does not have.)
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --prefix /installed ".[server]"

FROM python:3.12-slim
COPY --from=build /installed /usr/local

# The root file system can be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TELELOADER_HOST=0.0.0.0 \
    TELELOADER_PORT=8000 \
    TELELOADER_NUM_WORKERS=2
# 0.0.0.0 is the container's own network; who can reach that is decided where the port is published.
EXPOSE 8000
USER 10001:10001

# http.client, because urllib would ask a proxy that the environment names.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "-c", "\
import http.client, os; \
server = http.client.HTTPConnection('127.0.0.1', int(os.environ['TELELOADER_PORT']), timeout=4); \
server.request('GET', '/readyz'); \
raise SystemExit(server.getresponse().status != 200)"]

# In exec form, so that the server itself is what SIGTERM reaches.
ENTRYPOINT ["teleloader-server"]
CMD ["--demo"]
