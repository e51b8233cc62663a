"""The HTTP side: takes submissions, answers questions about runs, streams their events. Knows store and bus, never the worker."""
