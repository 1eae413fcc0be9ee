"""SEE: shared experience exchange, typed records in bounded queues."""
