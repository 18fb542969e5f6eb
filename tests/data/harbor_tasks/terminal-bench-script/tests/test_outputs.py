assert open("/app/hello").read() == "hello\n"
