# Demo training process, with NumPy and without torch to keep the image small. Build at the root of the repository:
#
#   docker build -f docker/trainer.Dockerfile -t teleloader-trainer .
#   docker run --rm --network host -v "$PWD/docker/secrets/trainer-token:/run/secrets/token:ro" \
#       -e TELELOADER_TOKEN_FILE=/run/secrets/token teleloader-trainer --url http://127.0.0.1:8000

# See server.Dockerfile.
ARG PYTHON=python:3.12.12-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /source
COPY docker/requirements/build.txt docker/requirements/trainer.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement build.txt \
    && pip install --no-cache-dir --require-hashes --requirement trainer.txt --prefix /installed \
    && find /installed -type d -name tests -prune -exec rm -r {} +
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY shared shared
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps --no-build-isolation --prefix /installed .

FROM ${PYTHON}
COPY --from=build /installed /usr/local
COPY examples/train_digits.py /app/

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001

# PID 1 ignores signals without a handler: Python installs one for SIGINT, none for SIGTERM.
STOPSIGNAL SIGINT
ENTRYPOINT ["python", "/app/train_digits.py"]
