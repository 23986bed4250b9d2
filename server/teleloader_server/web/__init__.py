"""HTTP and WebSocket endpoints, the dashboard, and connection limits around uvicorn.

The package imports all others except the command line. Start reading in `app`. This module creates the application from
these routers: `batches` (HTTP endpoints for datasets, loaders and batches), `stream` (WebSocket endpoint for batches),
`status` (monitoring and health checks), `sign_in` (browser sessions) and `dashboard` (web page). `authentication`
protects all endpoints; `guard` and `websocket` enforce limits on connections.
"""
