"""`thinwire bench RECIPE`: codecs over the links between processes, beside plain torch."""
