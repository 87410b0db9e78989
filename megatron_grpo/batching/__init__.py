"""How samples become global batches and micro-batches: the timetable, the split over ranks, packing, arrays. No process groups."""
