"""HTTP and WebSocket endpoints, the dashboard, and connection limits around uvicorn.

Imports all other packages except the command line. Entry point: `app`, which assembles the application. `batches` and
`stream` send batches, `status` serves /stats and metrics, `guard` enforces limits on connections.
"""
