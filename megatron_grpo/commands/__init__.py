"""Commands that advise people before and after a run. No rank imports them."""
