"""`thinwire bench RECIPE`: codecs over slow links, beside plain torch."""
