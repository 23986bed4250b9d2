# A trainer of the demo, with NumPy and without torch, so that it stays small. Build it at the root of the repository:
#
#   docker build -f docker/trainer.Dockerfile -t teleloader-trainer .
#   docker run --rm --network host teleloader-trainer --url http://127.0.0.1:8000

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY server server
COPY shared shared
# Installed aside, so that neither the source nor what builds it comes into the image. (The linter would have a version
# pinned, which a source tree does not have.)
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --prefix /installed ".[demo]"

FROM python:3.12-slim
COPY --from=build /installed /usr/local
COPY examples/train_digits.py /app/

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001

# A first process that has no handler for SIGTERM never sees it; Python has one for SIGINT.
STOPSIGNAL SIGINT
ENTRYPOINT ["python", "/app/train_digits.py"]
