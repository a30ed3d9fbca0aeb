"""Workers of `bench_parameter_server`: one model under four engines, each a script for its own launcher."""
