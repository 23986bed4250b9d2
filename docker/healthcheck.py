"""The health check of the server's container: whether batches can be had."""

import http.client
import os
import ssl

# not urllib, which would ask a proxy that the environment names
where, port = "127.0.0.1", int(os.environ["TELELOADER_PORT"])
if "TELELOADER_SSL_CERTFILE" in os.environ:
    # the certificate is for the name that clients use; nothing secret is said here
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    server: http.client.HTTPConnection = http.client.HTTPSConnection(where, port, timeout=4, context=trusting)
else:
    server = http.client.HTTPConnection(where, port, timeout=4)
try:
    server.request("GET", "/readyz")
    ready = server.getresponse().status == http.client.OK
except (ssl.SSLError, ConnectionError):
    # whoever wants a certificate of each client is there, and hangs up on this one
    ready = "TELELOADER_SSL_CA_CERTS" in os.environ
raise SystemExit(not ready)
