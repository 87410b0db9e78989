"""What the loop calls: rollouts, rows that wait, scoring, evaluation, the push of weights, the teacher."""
