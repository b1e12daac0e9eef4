"""Pipeline parallelism: schedules as data, stages of a model, and the executor that runs them."""
