"""The engines that run attempts; `jobs/backend_registry` lists them."""
