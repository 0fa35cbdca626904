"""The scheduler role: owns every KV page of every worker, the queue, placement and the step plans."""
