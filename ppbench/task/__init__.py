"""What is learnt: data sets, partitions over clients, models, losses."""
