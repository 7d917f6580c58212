"""The processes that train together: how they are started, how they connect, and the process sets among them."""
