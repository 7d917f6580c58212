"""The processes that train together: how they are started, how they meet, and the process sets among them."""
