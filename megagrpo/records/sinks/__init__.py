"""Outputs of a run's metrics and completions: one file per tracker, whose class has the methods of `sink.Sink`."""
