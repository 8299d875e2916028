package main

func Example() {
	main()
	// Output:
	// confirmation-1001: sent provider/confirmation-1001
	// confirmation-1002: sent provider/confirmation-1002
	// confirmation-1003: dead refused
	// mails that left the provider: 2
}
