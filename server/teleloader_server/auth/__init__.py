"""Authentication of clients by token or session cookie, rate limits, and the server's TLS certificate.

Imports `dispatch` and the layers below it, never the web application. Authorization is in `permissions`. Start
reading in `authenticator`.
"""
