"""Parts that the training loop calls: rollouts, the sample buffer, scoring, evaluation, weight sync, the teacher."""
