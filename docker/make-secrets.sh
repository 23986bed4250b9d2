#!/bin/sh
# Generate the secrets of docker-compose.yml in docker/secrets/. Existing ones are kept.
#
# The files are world-readable, because containers run as other users; the folder is private. (`teleloader-server token
# add` would create them with mode 0600, and needs an installation.)
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
umask 022

make() { # write a random secret to the file, unless it exists
    [ -s "secrets/$1" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"secrets/$1"
}

make trainer-token
make prometheus-token
make grafana-password

# the server stores only digests, which cannot be used to authenticate
digest() {
    if command -v sha256sum >/dev/null; then sha256sum "secrets/$1"; else shasum -a 256 "secrets/$1"; fi | cut -d ' ' -f 1
}
cat >secrets/tokens.toml <<EOF
[trainer]
sha256 = "$(digest trainer-token)"
scopes = ["read"]

[prometheus]
sha256 = "$(digest prometheus-token)"
scopes = ["stats"]
EOF
echo "secrets for docker compose are in docker/secrets; Grafana's admin password is in docker/secrets/grafana-password"
