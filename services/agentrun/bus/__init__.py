"""Redis, which carries work to workers and output to readers, and owns nothing: whatever it loses is in Postgres.

No other room speaks to Redis, and no exception of the client library leaves this one: BusUnavailable means try again later,
BusMisconfigured that somebody has to change something.
"""
