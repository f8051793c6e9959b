"""The evaluation of the PagedAttention paper (Kwon et al., SOSP'23), repeated on this engine: `make paper`."""
