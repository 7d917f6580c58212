"""What training tells of itself: who holds up whom, whether replicas are equal, the numbers of a step, a timeline."""
