"""Authentication of clients by token, certificate or session cookie, rate limits, and the server's TLS certificate.

The package imports only `dispatch` and the layers below it, and not the web application. Authorization is in
`permissions`. Start reading in `authenticator`.
"""
