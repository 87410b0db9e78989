"""How samples become global batches and micro-batches: sizes, timetable, split over ranks. Pure: no process group."""
