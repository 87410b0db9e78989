"""How samples become global batches and micro-batches: sizes, the timetable, the split over ranks. Pure; no process group, no torch in sizes."""
