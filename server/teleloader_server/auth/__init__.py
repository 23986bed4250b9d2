"""Authentication: from credentials to a principal, rate limits, and the server's certificate.

May import `dispatch` and what lies below it, and nothing of the web application. What a principal may do is decided in
`permissions`. Start reading in `authenticator`.
"""
