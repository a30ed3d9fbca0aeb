"""Workers of `bench_parameter_server`: two models under five engines, each a script for its own launcher."""
