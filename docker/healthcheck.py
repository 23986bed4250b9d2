"""Health check of the server's container: exits with 0 if the server is ready."""

import http.client
import os
import ssl

# not urllib, which would use a proxy from the environment
where, port = "127.0.0.1", int(os.environ["TELELOADER_PORT"])
if "TELELOADER_SSL_CERTFILE" in os.environ:
    # the certificate has the name that clients use, not 127.0.0.1; the request contains no secrets
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    server: http.client.HTTPConnection = http.client.HTTPSConnection(where, port, timeout=4, context=trusting)
else:
    server = http.client.HTTPConnection(where, port, timeout=4)
try:
    server.request("GET", "/readyz")
    ready = server.getresponse().status == http.client.OK
except ConnectionRefusedError:
    ready = False
except (ssl.SSLError, ConnectionError):
    # a server that requires client certificates closes this connection
    ready = "TELELOADER_SSL_CA_CERTS" in os.environ
raise SystemExit(not ready)
