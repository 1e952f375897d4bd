"""Outputs of a run's metrics and completions: one file per tracker, each with a class that has the methods of
`sink.Sink`."""
