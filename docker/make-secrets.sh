#!/bin/sh
# Make what the compose file's services show each other, each in a file of docker/secrets/, and leave what is there.
#
# A file is readable for all, because the users inside containers are others than you; the folder is yours alone. That
# is why `teleloader-server token add` does not make them: its files have mode 0600. It would have to be installed, too.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
umask 022

make() { # a file with a secret, unless it is there
    [ -s "secrets/$1" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"secrets/$1"
}

make trainer-token
make prometheus-token
make grafana-password

# the loader knows the digests only: who reads its file cannot come in by it
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
echo "docker/secrets has what docker compose needs; the password of Grafana's admin is in docker/secrets/grafana-password"
