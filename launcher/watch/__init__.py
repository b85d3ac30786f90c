"""An attempt under way: its guards, what its ranks print, how it ends and what follows."""
