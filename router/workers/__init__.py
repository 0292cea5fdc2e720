"""`serve --workers N`: routers in processes of their own behind one port, and the supervisor that keeps them."""
