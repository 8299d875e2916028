package main

func Example() {
	main()
	// Output:
	// before the relay runs:
	//   login-ana sent
	//   login-ben sending
	// after it:
	//   login-ana sent
	//   login-ben sent
}
