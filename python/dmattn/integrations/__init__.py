"""dmattn in other libraries, one package each; a package is imported only where its library is installed."""
