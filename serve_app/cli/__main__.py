"""`python -m serve_app.cli`, for a checkout that is not installed."""

from serve_app.cli import main

main()
