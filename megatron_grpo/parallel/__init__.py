"""The only rooms that know how ranks are arranged: the grid (layout), its process groups (state), and what is sent over them."""
