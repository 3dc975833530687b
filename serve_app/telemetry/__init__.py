"""Names of stages, spans, metrics and the cold-start ledger."""
