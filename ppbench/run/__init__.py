"""Running: from a configuration to records: tasks, cells, training, attacks, jobs and where they run."""
