"""Groups on their way: order, reads, transfers, the ring, and the executor that drives them."""
