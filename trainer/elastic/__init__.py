"""Training that continues after a rank is lost: commits in the memory of hosts, and the loop that resumes from them."""
