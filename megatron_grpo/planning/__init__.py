"""The plan report: sizes, timetable, memory and cost of a run, from its settings alone. No torch."""
