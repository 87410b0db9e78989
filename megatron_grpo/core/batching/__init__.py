"""Turn samples into global batches and micro-batches: training schedule, partition over ranks, packing, arrays. No process groups."""
