"""HTTP and WebSocket endpoints, the dashboard, and the limits around uvicorn.

May import everything but the command line. Start reading in `app`: it assembles the application. `batches` and `stream`
send batches, `status` serves /stats and metrics, `guard` enforces limits on connections.
"""
